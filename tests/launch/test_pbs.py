"""A PBS job, line by line against the grammar of qsub's manual page.

The manual is qsub.1B of OpenPBS. That `select` may be a number of nodes alone is from ABCI's documentation
(v3). No PBS has run these scripts.
"""

import re

import pytest

# Option → its argument. Of -N, -P and -q the characters that the manual allows; a chunk is resource=value.
CHUNK = r"[a-z_]+=[^:+\s]+(:[a-z_]+=[^:+\s]+)*"
OPTIONS = {
    "-N": r"[A-Za-z0-9][!-~]{0,235}",
    "-q": r"[\w.-]+(@[\w.-]+)?|@[\w.-]+",
    "-P": r'[^/\[\]";:|<>+,?*\s]+',
    "-l": rf"select=\d+(:{CHUNK})?(\+\d+(:{CHUNK})?)*|walltime=\d+(:[0-5]\d){{0,2}}|place=[a-z:]+",
    "-r": r"[yn]",
    "-j": r"oe|eo|n",
    "-o": r'([\w.-]+:)?(/[^\s"]+|"/[^"]+")',  # quotes as in a shell: POSIX, qsub, Script Preservation
}
# What the server sets for a job: its number and the server, the file of nodes, the number of starts.
GIVEN = {"PBS_JOBID", "PBS_NODEFILE", "PBS_RUNCOUNT"}


@pytest.fixture
def job(launched) -> list[str]:
    return (launched["abci3"] / "job.sh").read_text(encoding="utf-8").splitlines()


def complaints(lines: list[str]) -> list[str]:
    """Returns the lines of the request that the grammar does not have."""
    found = []
    for line in lines:
        if line.startswith("#PBS"):
            prefix, option, argument = [*line.split(" ", 2), "", ""][:3]
            if prefix != "#PBS" or not re.fullmatch(OPTIONS.get(option, "(?!)"), argument):
                found.append(line)
    return found


def test_every_line_of_the_request_is_in_the_grammar(job) -> None:
    """Each option once (-l: each resource once), and none where qsub does not look any more."""
    requests = [line for line in job if line.startswith("#PBS")]
    assert len(requests) >= 8 and complaints(job) == []
    names = [line.partition("=")[0] if line.split()[1] == "-l" else line.split()[1] for line in requests]
    assert len(names) == len(set(names))
    first = next(number for number, line in enumerate(job) if line and not line.startswith("#"))
    assert [line for line in job[first:] if line.startswith("#PBS")] == []


@pytest.mark.parametrize(
    "line",
    [
        "#PBS -N two words", "#PBS -l select=16 nodes", "#PBS -l walltime=7 days", "#PBS -l walltime=1:99:00",
        "#PBS -P a/b", "#PBS -j oo", "#PBS -r yes", "#PBS -o logs", "#PBS --nodes=2", "#PBS -N", "#PBS-N x",
    ],
)  # fmt: skip
def test_the_grammar_refuses(line: str) -> None:
    """Lines that qsub refuses, or would read otherwise."""
    assert complaints([line]) == [line]


def test_the_request_is_the_plan(job) -> None:
    """Queue, project, nodes and time are those that were asked for."""
    wanted = {"-q rt_HF", "-P gaa00000", "-l select=16", "-l walltime=168:00:00", "-N poro_34b"}
    assert wanted <= {line.removeprefix("#PBS ") for line in job}


def test_only_variables_that_the_server_gives_are_read(job) -> None:
    assert set(re.findall(r"\bPBS_\w+", "\n".join(job))) == GIVEN


def test_the_chain_by_the_manual(launched) -> None:
    """A job follows another whatever became of it: -W depend=afterany:ID, with the id that qsub printed."""
    text = (launched["abci3"] / "submit.sh").read_text(encoding="utf-8")
    (command,) = re.findall(r"^submit_one\(\) \{ (.*); \}$", text, re.MULTILINE)
    assert command == 'timeout 300 qsub ${1:+-W "depend=afterany:$1"} "$FOLDER/job.sh" | id_of'
