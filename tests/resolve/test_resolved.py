"""Steps of a run of three phases, counted by hand: their tokens, phases, and where a range of them ends."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kielo.recipe.errors import KieloError
from kielo.resolve.resolve import consent, flat
from kielo.resolve.resolved import Identity, StepRange, read, write
from tests.resolve.golden_runs import golden_resolved

# (steps, tokens of a step, tokens of a sequence): steps 1 to 3, 4 to 7 and 8 to 9
SIZES = ((3, 100, 20), (4, 250, 50), (2, 40, 10))


def run(**train: Any) -> Identity:
    identity = golden_resolved("tiny").identity
    phases, first = [], 1
    for number, (steps, tokens, length) in enumerate(SIZES, start=1):
        changes = {"number": number, "first_step": first, "steps": steps, "tokens_per_step": tokens}
        phases.append(identity.phases[0].model_copy(update=changes | {"sequence_length": length}))
        first += steps
    changed = identity.train.model_copy(update=train)
    return identity.model_copy(update={"phases": tuple(phases), "train": changed})


def test_steps_and_tokens_are_counted_over_phases() -> None:
    """Steps after the last have its size."""
    identity = run()
    assert (identity.total_steps, identity.total_tokens, identity.longest_sequence_length) == (9, 1380, 50)
    tokens = {0: 0, 1: 100, 3: 300, 4: 550, 7: 1300, 8: 1340, 9: 1380, 11: 1460}
    assert {step: identity.tokens_after(step) for step in tokens} == tokens
    assert [identity.phase_index(step) for step in (1, 3, 4, 7, 8, 9, 12)] == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("step", "also", "phase", "last", "is_skipped"),
    [
        (1, [], 0, 1, False),  # before the change at step 2
        (2, [], 0, 3, False), (3, [], 0, 3, False),
        (4, [], 1, 4, False),  # before the step that is skipped
        (5, [], 1, 5, True), (6, [], 1, 7, False), (7, [], 1, 7, False), (8, [], 2, 9, False),
        (8, [(9, 20)], 2, 8, False), (9, [(9, 20)], 2, 9, True),
        (2, [(2, 8)], 0, 3, True), (4, [(2, 8)], 1, 5, True), (4, [(3, 4)], 1, 4, True),
        (6, [(7, 7), (2, 3)], 1, 6, False),
    ],
)  # fmt: skip
def test_a_range_ends_where_something_changes(step, also, phase, last, is_skipped) -> None:
    """The phase, the precision, or whether steps are taken: changes at steps 2 and 6; step 5 is skipped."""
    identity = run(precision_changes=((2, "fp32"), (6, "bf16")), skip_steps=((5, 5),))
    assert identity.next_steps(step, also) == StepRange(phase, last, is_skipped)


def test_numbers_of_a_run_do_not_change() -> None:
    for part in (run().phases[0], run().learning_rates[0], golden_resolved("tiny").placement):
        with pytest.raises(ValidationError, match="Instance is frozen"):
            part.tokens = 7


def test_a_file_of_another_hand_is_not_written_over(tmp_path: Path) -> None:
    """Its own is; a folder, and text that is none, are not Kielo's."""
    path, resolved = tmp_path / "resolved.toml", golden_resolved("tiny")
    write(resolved, path)
    write(resolved, path)
    assert read(path) == resolved
    assert path.read_text().startswith("# Written by kielo from the recipe and the machine; edit the recipe")
    for name, content in (("text.toml", b"name = 1\n"), ("bytes.toml", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(KieloError, match=f"{name}: exists, and Kielo did not write it"):
            write(resolved, tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    with pytest.raises(KieloError, match="exists, and Kielo did not write it"):
        write(resolved, tmp_path)
    (tmp_path / "link.toml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(KieloError, match="exists, and Kielo did not write it"):
        write(resolved, tmp_path / "link.toml")
    with pytest.raises(
        KieloError, match=r"none.toml: cannot be read \(No such file or directory\). Fix: `kielo"
    ):
        read(tmp_path / "none.toml")
    with pytest.raises(KieloError, match=r"text.toml: says format version 0|text.toml: "):
        read(tmp_path / "text.toml")


def test_keys_of_tables_are_dotted_and_tables_in_lists_numbered() -> None:
    content = {"a": {"b": 1, "c": {"d": [2, 3]}}, "e": [{"f": 4}, {"f": 5}], "g": [], "h": {}}
    assert flat(content) == {"a.b": 1, "a.c.d": [2, 3], "e.1.f": 4, "e.2.f": 5, "g": []}


def longer(warmup: int, decay: int, steps: int) -> Any:
    """The tiny run with so many steps, and so many tokens of warm-up and decay."""
    resolved = golden_resolved("tiny")
    (phase,), (rate,) = resolved.identity.phases, resolved.identity.learning_rates
    size = phase.tokens_per_step
    changes = {"schedule": "wsd", "tokens": steps * size, "warmup_tokens": warmup, "decay_tokens": decay}
    identity = resolved.identity.model_copy(
        update={
            "phases": (phase.model_copy(update={"steps": steps}),),
            "learning_rates": (rate.model_copy(update=changes),),
        }
    )
    return resolved.model_copy(update={"identity": identity})


def test_a_longer_run_is_refused_with_its_own_way() -> None:
    """Where every length has changed too; and it goes on where the steps that are done were level."""
    old = longer(20, 30, 10).identity
    with pytest.raises(KieloError, match=r"(?s)4 training settings differ.*To make the run longer: "):
        consent(old, longer(40, 60, 20), 3)
    with pytest.raises(KieloError, match=r"(?s)2 training settings differ.*To make the run longer: "):
        consent(old, longer(20, 30, 20))
    consent(old, longer(20, 30, 20), 3)
    consent(old, longer(20, 60, 20), 3)
    with pytest.raises(KieloError, match=r"(?s)2 training settings differ.*\nGo back to the old"):
        consent(longer(20, 30, 20).identity, longer(20, 30, 10), 3)
