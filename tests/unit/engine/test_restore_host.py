"""Which processors may take an image: those with the instructions that a program may have chosen."""

from __future__ import annotations

from gpucr_hpc.engine.restore import lacking

HERE = ["fpu", "vme", "sse", "sse2", "avx", "avx2", "fma", "aes", "sha_ni", "bmi1", "bmi2", "constant_tsc"]
OTHER = ["pti", "ibrs", "ibpb", "stibp", "md_clear", "flush_l1d", "ssbd", "vmx", "svm", "ida", "arat", "hwp", "hwp_epp"]
OTHER += ["cpuid", "cat_l3", "retpoline", "smca", "nonstop_tsc"]
MORE = ["avx512f", "amx_tile", "sha512", "vpclmulqdq", "gfni", "avx_vnni", "waitpkg", "rdrand", "sse4a", "popcnt"]


def test_what_the_kernel_or_the_firmware_makes_of_a_processor_does_not_count():
    """Mitigations, virtualisation, power: another kernel or setting on the same processor."""
    assert lacking([*HERE, *OTHER], HERE, "x86_64") == []


def test_instructions_count():
    assert lacking([*HERE, *MORE], HERE, "x86_64") == sorted(MORE)
    assert lacking(["asimd", "sve", "paca"], ["asimd"], "aarch64") == ["paca", "sve"]
