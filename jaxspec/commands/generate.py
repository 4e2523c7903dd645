"""`jaxspec generate`: answer prompts on the terminal, or as JSON."""

import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from jaxspec.commands.colours import Colours
from jaxspec.commands.options import ConfigOption, read_settings, with_engine_and_sampling
from jaxspec.commands.prompts import Prompt, read_prompts
from jaxspec.commands.running import interruptible, load, sample_fields, submit, summary
from jaxspec.config import SamplingParams
from jaxspec.errors import RequestError
from jaxspec.host.request import CompletionOutput, TextDelta

if TYPE_CHECKING:
    import jaxspec.llm


@with_engine_and_sampling
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to answer; standard input is one prompt if there are none.", show_default=False),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            help="Take prompts from a file: one a line, or .jsonl rows with 'prompt', 'messages' or 'turns'.",
            metavar="FILE",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="The system message of the chat.", metavar="TEXT")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each prompt, for each sample where --n is above 1.")
    ] = False,
    show_speculation: Annotated[
        bool,
        typer.Option(
            "--show-speculation",
            help="Colour the text: accepted drafts green, a token of the model's own red where it rejected a draft "
            "and cyan after a draft accepted whole. Example: --drafter ngram --show-speculation",
        ),
    ] = False,
    config: ConfigOption = None,
    **options: Any,
) -> int:
    """Answer prompts, and print statistics on stderr.

    A single answer appears as it is written; several are printed whole, in the order of their prompts.

    Examples:

    - `jaxspec generate "Write a short poem about the sea."`

    - `jaxspec generate --raw "Once upon a time" --temperature 0.8 --seed 7 --n 3`

    - `jaxspec generate "Repeat after me: the sea, the sea." --drafter ngram --show-speculation`

    - `jaxspec generate --file questions.txt --config creative --json > answers.jsonl`
    """
    asked = read_prompts(prompts or [], file, raw, system)
    settings = read_settings(config, options)
    engine_config, params = settings.engine, settings.sampling
    if options["max_batch"] is None:
        wanted = min(len(asked) * params.samples, engine_config.max_batch)
        engine_config = msgspec.structs.replace(engine_config, max_batch=wanted)

    colours = Colours(as_json) if show_speculation else None
    shown = Answers(asked, params.n, as_json, colours)
    with interruptible(lambda: f"{shown.next} of {len(asked)} prompts are answered"):
        llm = load(engine_config)
        began = time.perf_counter()
        _run(llm.engine, asked, params, shown)
        seconds = time.perf_counter() - began
    finished = shown.finished
    if colours:
        colours.print_legend()
    print(summary(finished, finished[0].stats.seconds if len(finished) == 1 else seconds), file=sys.stderr)
    shown.raise_first_error()
    return 0


def _run(engine: "jaxspec.llm.Serving", asked: list[Prompt], params: SamplingParams, shown: "Answers") -> None:
    for index, prompt in enumerate(asked):
        try:
            submit(engine, str(index), prompt.source, params)
        except RequestError as error:
            raise RequestError(f"prompt {index + 1}: {error}" if len(asked) > 1 else str(error)) from error
    while engine.has_work:
        for delta in engine.step():
            shown.take(delta)


class Answers:
    """Prints answers: a single one as it comes, several whole and in the order of their prompts."""

    def __init__(self, asked: list[Prompt], n: int, as_json: bool, colours: Colours | None = None) -> None:
        self.asked, self.n, self.as_json, self.colours = asked, n, as_json, colours
        self.streams = not as_json and len(asked) * n == 1
        self.waiting: dict[int, dict[int, CompletionOutput]] = defaultdict(dict)
        self.texts: dict[tuple[int, int], list[str]] = defaultdict(list)
        """What was told of each sample so far, by prompt and index."""
        self.finished: list[CompletionOutput] = []
        self.next = 0
        """Prompts answered and printed: the place in `asked` of the next one."""

    def take(self, delta: TextDelta) -> None:
        """Print what this news allows to be printed."""
        prompt = int(delta.request_id)
        text = self.colours.paint(delta.pieces) + delta.rest if self.colours else delta.text
        if self.streams:
            print(text, end="", flush=True)
        else:
            self.texts[prompt, delta.index].append(text)
        if delta.finished is None:
            return
        self.waiting[prompt][delta.index] = delta.finished
        while len(self.waiting[self.next]) == self.n:
            samples = self.waiting.pop(self.next)
            self._print([samples[index] for index in range(self.n)])
            self.next += 1

    def _print(self, outputs: list[CompletionOutput]) -> None:
        self.finished += outputs
        for output in outputs:
            if self.as_json:
                fields: dict[str, Any] = {"prompt": self.asked[self.next].text}
                if self.n > 1:
                    fields["index"] = output.index
                print(msgspec.json.encode(fields | sample_fields(output)).decode())
            elif self.streams:
                print()
            else:
                print(f"{self._header(output)}\n{''.join(self.texts[self.next, output.index])}\n")
        sys.stdout.flush()

    def _header(self, output: CompletionOutput) -> str:
        text = " ".join(self.asked[self.next].text.split())
        sample = f" ({output.index + 1} of {self.n})" if self.n > 1 else ""
        return f"=== {text if len(text) <= 72 else text[:71] + '…'}{sample}"

    def raise_first_error(self) -> None:
        """RequestError for the first sample that failed, once all the others are printed."""
        for place, output in enumerate(self.finished):
            if output.finish_reason == "error":
                raise RequestError(f"prompt {place // self.n + 1}: {output.stop_reason}")
