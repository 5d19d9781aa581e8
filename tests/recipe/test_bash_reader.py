"""Bash scripts, read and never executed. The referee is bash: it gives a command the words that we read."""

import subprocess
import time
from pathlib import Path

import pytest

from kielo.recipe.errors import KieloError
from kielo.recipe.from_script.bash_expansion import shown
from kielo.recipe.from_script.bash_reader import Script, read_script

SCRIPTS = Path(__file__).parent / "scripts"

# Scripts that end in `show WORDS`. Bash prints the words.
AS_BASH = {
    "quotes": r"""A="x y"; show $A "$A" '$A' a\ b "c\"d" $'e\tf' "" ''""",
    "a default": 'B=b; show ${A:-1} ${A-2} ${B:-3} ${B:+4} ${A:+5} "${A:=6}" $A',
    "a nested default": 'A=7; show ${C:-${B:-"$A 8"}} "${C:-${B:-$A 8}}"',
    "parts": "P=/a/b.tar.gz; show ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${#P} ${P:1:3} ${P/b/c} ${P//a/_} ${P^^}",
    "a number without _": "T=1_000_000; T=${T//_}; show $T $((T / 2048))",
    "arithmetic": "A=7; B=2; show $((A*B)) $((A/B)) $((-A/B)) $((A%B)) $((A**B)) $((A>B)) "
    "$((A==7&&B!=3)) $(( (A+1)<<2 ))",
    "arrays": 'A=(1 "2 3"); A+=(4); A[0]=0; show "${A[@]}" ${A[@]} "${A[*]}" ${#A[@]} ${A[1]} "${A[1]}" $A',
    "an empty array": 'A=(); show a "${A[@]}" b',
    "a continued command": "show a \\\n  b  \\\n  c # d\n",
    "a string": 'A=" \\\n --x 1 \\\n --y 2 \\\n"; A="$A --z"; A+=" --w"; show $A',
    "conditions": "A=2; if [ $A -gt 1 ] && [[ $A == 2 ]]; then B=x; elif :; then B=y; else B=z; fi; show $B",
    "arithmetic conditions": "A=2; B=1; if ((A > 1)); then B=2; fi; (( A < 1 )) && B=3; show $B",
    "an unset variable": 'if [ -z "$QQ" ]; then A=1; else A=2; fi; [ -n "$QQ" ] || B=3; show $A $B',
    "case": "S=7b; case $S in 1b|2b) L=1;; 7*) L=32;; *) L=0;; esac; show $L",
    "loops": 'for n in 1 2 "3 4"; do A="$A $n"; done; while [ ${#B} -lt 3 ]; do B=x$B; done; show $A $B',
    "functions": 'f() { local X=$1; OUT="$X-$2"; }; function g { f $1 b; }; g a; show $OUT',
    "here-documents": 'X=3\ncat > f.json <<EOF\n{"a": $X, "b": "\\$X \'1\'"}\nEOF\nshow done\n',
    "a shell in a shell": 'export C=\'show a "b c"\'; bash -c "$C"; eval $C; show d',
    "output of text commands": 'P=/a/b.sh; show $(basename $P) `dirname $P` "$(echo x  y)"',
    "an indirect variable": "A=B; B=4; show ${!A}",
    "set": "set -- a b; show $# $2 ${1}; shift; show $1",
    "a pipe": "show a 2>&1 | cat -; show b >/dev/stdout",
    "groups": "{ A=1; B=2; }; (C=3); ! false; show $A $B",
    "braces": 'A=3; for i in {0..3} {a,b}x; do L="$L $i"; done; show $L {08..10} {c..a} '
    "{5..1..2} x{1,{2,3}}y{,z} '{1,2}' \\{1,2} {1} {a,b {1..$A} ${A}{1,2} {$A,\"b c\"}",
    "a subshell": "A=1; set -- x; (A=2; set -- y; show $A $1); show $A $1",
    "local variables": "X=1; Y=2; f() { local X=$X$1 Y; X=${X}b; Z=$X; show $X; }; f a; show $X $Y $Z",
    "shift by a number": "set -- a b c d; shift 2; show $@; shift 5; show $@",
    "octal numbers": "A=010; show $((A + 1)) $((10#08 + 0)) $((0x10)) $((00 + 7))",
    "an environment": "A=1 B=2 show c; export D=4 E; show $D",
}


def read(tmp_path: Path, text: str) -> Script:
    path = tmp_path / "script.sh"
    path.write_text(text, encoding="utf-8")
    return read_script(path)


@pytest.mark.parametrize("text", AS_BASH.values(), ids=AS_BASH)
def test_words_are_as_bash_has_them(tmp_path, text) -> None:
    show = 'show() { printf "%s\\0" "$@" "<end>"; }; export -f show\n'
    said = subprocess.run(["bash", "-c", show + text], cwd=tmp_path, capture_output=True, timeout=20)
    expected = [words.split("\0")[:-1] for words in said.stdout.decode().split("<end>\0")[:-1]]
    script = read(tmp_path, text)
    ours = [
        [shown(word) for word, _ in one.words[1:]] for one in script.commands if one.words[0][0] == "show"
    ]
    assert said.returncode == 0 and ours == expected and expected
    for name, content in script.files.items():
        assert content == (tmp_path / name).read_text()


def test_each_word_has_the_line_where_it_is_written(tmp_path) -> None:
    script = read(tmp_path, 'A="--x"\nB="$A \\\n  --y"\ntrain $B \\\n --z\n')
    assert script.commands[0].words == (("train", "4"), ("--x", "1"), ("--y", "3"), ("--z", "5"))


def test_nothing_is_executed_and_unknown_values_keep_their_names(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'touch mark\nA=$(touch mark; echo 1)\nB=`touch mark`\nC=$C\ntrain --a $A --b ${C} --d "x$B" $1\n'
    script = read(tmp_path, text)
    words = [shown(word) for word, _ in script.commands[-1].words]
    assert not Path("mark").exists() and script.missing == {"C": "4", "1": "5"}
    assert words == ["train", "--a", "$(touch mark; echo 1)", "--b", "$C", "--d", "x$(touch mark)", "$1"]


def test_what_only_a_job_decides_is_unknown(tmp_path) -> None:
    text = (
        "A=1; B=1; C=1; D=1\nif [ -f x ]; then A=2; B=1; else A=3; fi\n[ -d y ] && C=2\n"
        "while true; do D=${D}1; break; done\n"
        "E=1; F=1; for i in 1 2; do F=1; [ $i = 2 ] && break; E=$i$i; done\ntrain $A $B $C $D $E $F $i\n"
    )
    words = [shown(word) for word, _ in read(tmp_path, text).commands[-1].words]
    assert words == ["train", "$A", "1", "$C", "$D", "$E", "1", "$i"]


def test_values_of_a_job_come_from_its_lines(tmp_path) -> None:
    text = (
        "#SBATCH --nodes=3\n#SBATCH --gres=gpu:a100:4 # four\n##SBATCH --nodes=9\n"
        "#SBATCH --ntasks-per-node 2\n"
        "train $SLURM_JOB_NUM_NODES $SLURM_NNODES $SLURM_GPUS_ON_NODE $SLURM_NTASKS $SLURM_JOB_ID\n"
    )
    words = [shown(word) for word, _ in read(tmp_path, text).commands[0].words]
    assert words == ["train", "3", "3", "4", "6", "$SLURM_JOB_ID"]


def test_a_file_that_is_read_has_its_own_lines(tmp_path) -> None:
    (tmp_path / "lib.sh").write_text("\nA=--x\n")
    script = read(tmp_path, 'source "$(dirname "$0")/lib.sh"\n. absent.sh\ntrain $A\n')
    assert script.commands[0].words[1] == ("--x", "lib.sh:2") and script.absent == {"absent.sh": "2"}


def test_values_from_outside_win(tmp_path) -> None:
    path = tmp_path / "script.sh"
    path.write_text("A=$(date)\nA=2\ntrain $A $1 $2\n")
    words = [shown(word) for word, _ in read_script(path, {"A": "5", "2": "b"}).commands[-1].words]
    assert words == ["train", "5", "$1", "b"]


BROKEN = {
    "a quote": ('A="x\ntrain\n', 'line 1: "x has no end'),
    "an expansion": ("A=1\ntrain ${A\n", "line 2: ${ has no end"),
    "a here-document": ("cat <<E\nx\n", "the here-document has no line E"),
    "an if": ("if true; then\n x\n", "fi is missing"),
    "a bracket": ("train a)\n", "line 1: ')' without a beginning"),
    "a placeholder": ("A=<path> (such as x)\n", "line 1: '(' is not understood"),
    "a function that calls itself": ("f() { f; }\nf\n", "in 30 levels"),
    "a bomb": ("A=xxxxxxxxxx\n" + "A=$A$A$A$A\n" * 40, "grow beyond"),
    "a bomb of braces": ("train " + "{a,b}" * 20 + "\n", "grow beyond"),
    "a long range": ("train {1..900000000}\n", "line 1: {1..900000000} has more than 10,000 words"),
    "deep commands": ("{ " * 500 + "}; " * 500, "levels"),
    "no text": ("\0\0", "no bash script"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_script_is_refused(tmp_path, text, expected) -> None:
    started = time.monotonic()
    with pytest.raises(KieloError, match="Fix: ") as refusal:
        read(tmp_path, text)
    assert expected in str(refusal.value) and "script.sh" in str(refusal.value)
    assert time.monotonic() - started < 20


@pytest.mark.full
def test_a_cut_or_changed_script_is_read_or_refused(tmp_path) -> None:
    """Each prefix of a script, and each script without a line, ends in a reading or a KieloError."""
    text = (SCRIPTS / "bloom_176b.slurm").read_text()
    lines = text.splitlines(keepends=True)
    changed = [text[:at] for at in range(0, len(text), 37)]
    changed += ["".join(lines[:at] + lines[at + 1 :]) for at in range(len(lines))]
    refused = 0
    for one in changed:
        try:
            read(tmp_path, one)
        except KieloError:
            refused += 1
    assert 0 < refused < len(changed)
