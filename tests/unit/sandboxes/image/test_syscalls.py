"""image/syscalls.py: numbers from the headers of an architecture, and the size of the filter."""

from sandboxes.image.syscalls import ALLOWED_SYSCALLS, CONDITIONS, INSTRUCTION, compile_filter, parse_numbers

GENERIC = (
    "#define __NR_fcntl __NR3264_fcntl\n#define __NR3264_fcntl 25\n#define __NR_arch_specific_syscall 244\n#define SYS_read x\n"
)


def test_numbers_that_name_other_definitions_are_resolved():
    assert parse_numbers(GENERIC)["fcntl"] == 25
    assert "read" not in parse_numbers(GENERIC)


def test_a_list_of_known_numbers_only_is_compiled():
    program = [*INSTRUCTION.iter_unpack(compile_filter({"fcntl": 25, "socket": 198, "clone3": 435}, "aarch64"))]
    operands = [operand for *_, operand in program]
    assert operands.count(25) == 1
    assert operands.count(198) == sum(name == "socket" for name, _ in CONDITIONS)
    assert all(index + 1 + max(true, false) < len(program) for index, (_, true, false, _) in enumerate(program[:-1]))
    everything = {name: number for number, name in enumerate([*sorted(ALLOWED_SYSCALLS), "socket", "clone", "clone3"])}
    assert len(compile_filter(everything, "x86_64")) < 4096 * INSTRUCTION.size
