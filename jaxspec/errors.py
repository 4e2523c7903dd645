"""The errors a user can meet. Each message says what was wrong, where, and what would do."""


class JaxspecError(Exception):
    """Base of every error that jaxspec raises on purpose; the command line prints it as one line."""


class ConfigError(JaxspecError):
    """An option, or a combination of options, that cannot work."""


class LoadError(JaxspecError):
    """A model, tokenizer or prompt file that is missing, damaged or not supported."""


class CapacityError(JaxspecError):
    """More memory is needed than there is; the message holds the numbers."""


class RequestError(JaxspecError):
    """One request cannot be served; the others go on."""
