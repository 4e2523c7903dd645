"""Loops, branches, trips and units read from what the TPU compiler writes: a program made up in its format."""

from pathlib import Path

import pytest

from jaxspec.plan.llo import UNITS, Kernel, Span, dump_arguments, read_kernels, size

PROGRAM = """\
= control target key start
LH: loop header
= control target key end

     0   :  { %1 = dma.hbm_to_smem /*hbm=*/%s1, /*smem=*/%s2 }
   0x1 LB: > { %s8_s1 = sphi %s7, %s9 } /* Start region 3 */
   0x2   : > { %20 = dma.hbm_to_vmem [thread:$0] (%p1_p0) /*hbm=*/%s1 }
   0x3 LB: >> { %s5 = sphi 0, %s6 } /* Start region 10 :: End region 11 */
   0x4   : >> { %30 = sbr.rel (%p9_p1) target = $region20  ;;  %s4 = sadd.s32 (!%p9_p1), 1, %s5 }
   0x5   : >> { %31 = dma.hbm_to_vmem [thread:$0] /*hbm=*/%s1  ;;  %32 = shalt.err /* for %9 = dma.hbm_to_vmem */ }
   0x6   : >> { %33 = dma.hbm_to_vmem [thread:$0] /*hbm=*/%s1 }
   0x7   : >> { %34 = dma.hbm_to_vmem [thread:$0] /*hbm=*/%s1 }
   0x8 PF: >> { %35 = sbr.rel (%p8_p1) target = $region30 } /* Start/End empty region 20 */
   0x9   : >> { %s3_s9 = smov 0 /* copy for cssa */ }
   0xa LB: >>> { %36 = dma.hbm_to_vmem [thread:$0] /*hbm=*/%s1 } /* Start region 25 */
   0xb   : >>> { %p5_p2 = scmp.ge.s32.totalorder %s1_s1, %s2_s2 }
   0xc   : >>> { %37 = sbr.rel (!%p5_p2) target = $region25 }
   0xd PF: >> { %38 = sbr.rel (%p7_p1) target = $region40 } /* Start region 30 */
   0xe   : >> { %s3_s9 = smov 0 /* copy for cssa */ }
   0xf LB: >>> { %v1 = vmatmul.bf16 %v2 } /* Start region 35 */
  0x10   : >>> { %p6_p2 = scmp.ge.s32.totalorder %s3_s3, 3 /* loop exit test */ }
  0x11   : >>> { %39 = sbr.rel (!%p6_p2) target = $region35 }
  0x12 PF: >> { %40 = sbr.rel (%p6_p1) target = $region50 } /* Start/End empty region 40 */
  0x13   : >> { %v1 = vmatmul.bf16 %v2 }
  0x14   : >> { %v3 = vmax.f32 %v4, %v5 }
  0x15 LB: >>> { %44 = sbr.rel (%p1_p4) target = $region47 } /* Start region 45 */
  0x16   : >>> { %v1 = vmatmul.bf16 %v2 }
  0x17 PF: >>> { %p4_p2 = scmp.ge.s32.totalorder (%p6_p2), %s3_s3, 9 /* loop exit test */ } /* Start region 47 */
  0x18   : >>> { %41 = sbr.rel (!%p4_p2) target = $region45 }
  0x19 PF: >> { %p3_p3 = scmp.ge.s32.totalorder %s5_s5, %s6_s6 } /* Start/End empty region 50 */
  0x1a   : >> { %42 = sbr.rel (!%p3_p3) target = $region10 }
  0x1b   : > { %p2_p3 = scmp.ge.s32.totalorder %s8_s8, 10 /* loop exit test */ }
  0x1c   :  { %43 = sbr.rel (!%p2_p3) target = $region3 }
"""
BUNDLES, MULTIPLYING, SPILLING = 0x1D, (0xF, 0x13, 0x16), (0x10, 0x14)


def units() -> str:
    rows = [[0] * len(UNITS) for _ in range(BUNDLES)]
    for at in MULTIPLYING:
        rows[at][UNITS.index("MXU")] = 2
    for at in SPILLING:
        rows[at][UNITS.index("VLOAD:FILL")] = rows[at][UNITS.index("VSTORE:SPILL")] = 1
    table = "\n".join(" ".join(map(str, row)) for row in rows)
    return f"== CAPACITY:\n{', '.join(UNITS)}\n    4  3\n== UTILIZATION:\n{table}\n"


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    (tmp_path / "17-attend.1-03-final_bundles.txt").write_text(PROGRAM)
    (tmp_path / "17-attend.1-02-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:\n")
    (tmp_path / "17-attend.1-01-final_hlo-static-per-bundle-utilization.txt").write_text(units())
    [found] = read_kernels(tmp_path)
    return found


def test_loops_and_branches(kernel: Kernel) -> None:
    assert (kernel.name, kernel.span) == ("attend.1", Span(0, BUNDLES))
    assert kernel.loops == {
        Span(0x1, BUNDLES): 10,
        Span(0x3, 0x1B): None,
        Span(0xA, 0xD): None,
        Span(0xF, 0x12): 3,
        Span(0x15, 0x19): 9,
    }
    assert list(kernel.branches) == [Span(5, 8), Span(9, 0xD), Span(0xE, 0x12), Span(0x13, 0x19), Span(0x16, 0x17)]
    assert kernel.count("MXU", [kernel.span]) == 6
    assert kernel.count_copies([kernel.span]) == 5  # comments hold none


def test_what_runs(kernel: Kernel) -> None:
    loop = kernel.streaming_loop()
    assert loop is not None
    assert loop == Span(0x3, 0x1B)
    # What no jump skips; three copies; three trips of the faster body's loop.
    assert size(kernel.steady(loop)) == 7 + 3 + 1 + 3 * 3
    assert kernel.count_copies(kernel.steady(loop)) == 3
    assert kernel.count("MXU", kernel.steady(loop)) == 3 * 2
    assert kernel.spills(kernel.steady(loop)) == 2
    # The copies one by one in four trips; the longer body, with nine trips of its loop, in one of which it multiplies.
    assert size(kernel.last(loop, 4)) == 7 + 1 + 4 * 3 + 2 + 9 * 3 + 1
    assert kernel.count("MXU", kernel.last(loop, 4)) == 2 * 2
    # Of the outer loop.
    assert size(kernel.around(loop)) == 4
    assert kernel.spills([kernel.span]) == 4


def test_absent_files(tmp_path: Path) -> None:
    assert read_kernels(tmp_path / "nowhere") == []
    (tmp_path / "17-attend.1-03-final_bundles.txt").write_text(PROGRAM)
    [kernel] = read_kernels(tmp_path)
    assert (kernel.units, kernel.streaming_loop()) == ([], None)


def test_arguments_name_the_folder() -> None:
    assert "--xla_jf_dump_to=/somewhere " in dump_arguments(Path("/somewhere"))
