"""Layouts side by side, of made up seconds and bytes: the whole table, verdicts and differences by hand."""

from dataclasses import replace

import pytest

from kielo.plan.choose_layout import different_axes
from kielo.plan.compare import (
    SECONDS,
    changed_parts,
    compare,
    count_text,
    decimals,
    differences,
    gb_text,
    is_comparable,
    listed,
    parts_of,
    seconds_text,
    signed_text,
    unfit,
    verdict,
)
from kielo.plan.planned_layout import Need, PlannedLayout
from tests.plan.hand_made import a_phase, planned, run


def fast() -> PlannedLayout:
    """10 s: no bubble and 0.75 s less for products, for 0.2 s more of data traffic."""
    changes = {"matrix": 5.25, "bubble": 0.0, "data_traffic": 0.8, "elementwise": 0.63, "optimiser": 0.1}
    return planned(seconds=changes, bytes_={"weights": 3e9, "logits": 0.25e9}, pipeline=2, shard=6)


def test_the_table_of_two_layouts():
    """12 s and 10 s of 24 devices: 8,192 and 9,830.4 tokens/s, of 913.94 million FLOPs each."""
    slow = planned()
    titles, rows = compare([slow, fast()])
    assert titles == ("", "tp2-pp4-dp3-mb2-zero1-1f1b", "tp2-pp2-dp6-mb2-zero1-1f1b")
    assert rows == [
        ("nodes", "6", "6"), ("matrix products, s", "6.00", "5.25"), ("attention, s", "1.00", "1.00"),
        ("norms and activations, s", "0.80", "0.63"), ("kernel launches, s", "0.02", "0.02"),
        ("output head and loss, s", "0.50", "0.50"), ("pipeline bubble, s", "1.25", "0.00"),
        ("tensor traffic, s", "0.90", "0.90"), ("pipeline traffic, s", "0.30", "0.30"),
        ("data traffic, s", "0.60", "0.80"), ("optimiser, s", "0.13", "0.10"),
        ("fixed costs, s", "0.10", "0.10"), ("slowest device, s", "0.40", "0.40"),
        ("step, s", "12.00", "10.00"),
        ("80% interval, s", "11.00–14.50", "11.00–14.50"), ("tokens/s", "8,192", "9,830"),
        ("TFLOP/s a device", "0.3", "0.4"), ("MFU", "31.2%", "37.4%"), ("weights, GB", "4.0", "3.0"),
        ("gradients, GB", "4.5", "4.5"), ("optimiser state, GB", "8.0", "8.0"),
        ("activations, GB", "10.2", "10.2"), ("logits, GB", "0.0", "0.2"),
        ("gathered parameters, GB", "3.0", "3.0"), ("workspace, GB", "1.0", "1.0"),
        ("memory in all, GB", "30.7", "29.9"), ("of usable, GB", "48.0", "48.0"),
        ("host memory a node, GB", "48.0", "44.0"), ("fits", "yes", "yes"),
    ]  # fmt: skip
    # the longest decimals hold for all
    short = replace(slow, seconds={"matrix": 0.05}, bytes={"weights": 49e9}, nodes=1200)
    assert [row[1:] for row in compare([slow, short])[1] if row[0] in ("nodes", "step, s", "fits")] == [
        ("6", "1,200"), ("12.00000", "0.05000"), ("yes", "no"),
    ]  # fmt: skip


def test_verdicts():
    """A gain of 12 to 10 s by 1.25 s of bubble and, at least half of it, 0.75 s of products."""
    slow, quick = planned(), fast()
    names = "tp2-pp2-dp6-mb2-zero1-1f1b is 20.0% faster than tp2-pp4-dp3-mb2-zero1-1f1b"
    speeds = " (9,830 tokens/s against 8,192)"
    whole = (
        f"{names}{speeds}, mostly by pipeline bubble (−1.25 s a step), matrix products (−0.75 s a step), in "
    )
    assert verdict([slow, quick]) == f"{whole}spite of data traffic (+0.20 s)."
    assert verdict([quick]) == "tp2-pp2-dp6-mb2-zero1-1f1b fits: 9,830 tokens/s."
    large = replace(slow, bytes={"weights": 50e9}, nodes=7)
    assert verdict([large]) == "tp2-pp4-dp3-mb2-zero1-1f1b (50.0 of 48.0 GB) does not fit."
    assert verdict([quick, large]) == (
        "tp2-pp2-dp6-mb2-zero1-1f1b on 6 nodes alone fits: 9,830 tokens/s. tp2-pp4-dp3-mb2-zero1-1f1b on 7 "
        "nodes (50.0 of 48.0 GB) does not fit."
    )
    host = replace(slow, bytes={"weights": 30e9})
    assert verdict([host, large]) == (
        "tp2-pp4-dp3-mb2-zero1-1f1b on 6 nodes (120.0 of 107.4 GB of host memory a node) and "
        "tp2-pp4-dp3-mb2-zero1-1f1b on 7 nodes (50.0 of 48.0 GB) do not fit."
    )
    third = replace(slow, seconds={"matrix": 40.0})  # is not spoken of
    assert verdict([third, slow, quick]) == verdict([slow, quick])
    # a second reason of less than half is left out, and so are small losses: 0.005 of 9.25 s is 0.046
    small = replace(slow, seconds=slow.seconds | {"bubble": 0.0, "matrix": 5.4, "fixed": 0.145})
    assert ", mostly by pipeline bubble (−1.25 s a step)." in verdict([slow, small])
    exact = replace(slow, seconds=slow.seconds | {"bubble": 0.25, "matrix": 5.5, "fixed": 0.2})
    assert (
        "(−1.00 s a step), matrix products (−0.50 s a step), in spite of fixed costs (+0.10 s)."
        in verdict([slow, exact])
    )
    # steps of twice the tokens, in 12 s instead of 12: half of each part is saved
    double = replace(slow, phase=a_phase(2048, 2 * 98_304))
    assert verdict([slow, double]).startswith(
        "tp2-pp4-dp3-mb2-zero1-1f1b is 2.0 times as fast as tp2-pp4-dp3-mb2-zero1-1f1b (16,384 tokens/s "
        "against 8,192), mostly by matrix products (−6.00 s a step)."
    )


def test_differences_are_sorted_by_size():
    assert list(differences(fast(), planned()).items())[:4] == [
        ("bubble", -1.25), ("matrix", -0.75), ("data_traffic", pytest.approx(0.2)),
        ("elementwise", pytest.approx(-0.17)),
    ]  # fmt: skip
    one, other = (
        replace(planned(), seconds={"a": 2.0, "b": 1.0}),
        replace(planned(), seconds={"a": 1.0, "c": 4.0}),
    )
    assert differences(one, other, 0.5) == {"c": -2.0, "a": 1.5, "b": 1.0}
    assert differences(one, other) == {"c": -4.0, "a": 1.0, "b": 1.0}


def test_what_a_layout_takes_more_and_less():
    """Parts below 0.005 of 10 s, or of 12, are added up."""
    slow, quick = planned(), fast()
    assert changed_parts(quick, slow) == (
        "pipeline bubble (−1.25 s), matrix products (−0.75 s), data traffic (+0.20 s), norms and activations "
        "(−0.17 s), the rest −0.03 s"
    )
    assert changed_parts(slow, quick) == (
        "pipeline bubble (+1.25 s), matrix products (+0.75 s), data traffic (−0.20 s), norms and activations "
        "(+0.17 s), the rest +0.03 s"
    )
    assert changed_parts(slow, slow) == "the rest +0.00 s"
    exactly = replace(slow, seconds={"matrix": 8.0, "head": 0.04}), replace(slow, seconds={"matrix": 8.04})
    assert changed_parts(*exactly) == "the rest +0.000 s"


def test_layouts_of_the_same_step_and_machine_compare():
    one = planned()
    assert is_comparable(one, fast())
    elsewhere = replace(one.run, site=one.run.site.model_copy(update={"name": "there"}))
    larger = replace(one.run, model=one.run.model.model_copy(update={"num_hidden_layers": 9}))
    for changed in (
        {"nodes": 5},
        {"phase": a_phase(2048, 1)},
        {"phase": a_phase(1, 98_304)},
        {"run": elsewhere},
    ):
        assert not is_comparable(one, replace(one, **changed))
    assert not is_comparable(one, replace(one, run=larger))


def test_what_does_not_fit_is_said():
    """At the usable bytes it fits; a node's own memory decides only where the device's is enough."""
    one = planned()
    full = replace(one, bytes={"activations": 48e9})
    assert unfit(full) == "" and full.fits
    over = replace(one, bytes={"activations": 48.1e9})
    assert unfit(over) == ", which does not fit into 48.0 GB" and not over.fits
    host = replace(one, bytes={"weights": 30e9})
    assert unfit(host) == ", which does not fit into 107.4 GB of host memory a node" and not host.fits
    assert replace(one, bytes={"weights": 49e9}).need == Need(49e9, 48e9)
    assert Need(1, 1).fits and not Need(1.1, 1).fits and Need(1, 1).of_host == ""


def test_the_fastest_of_each_axes_stay():
    one, two, three, four = planned(), planned(zero=3), planned(context=2), fast()
    assert [id(found) for found in different_axes([two, one, three, four])] == [id(two), id(three), id(four)]


def test_numbers_have_the_steps_fourth_figure():
    """12.00 s; and of smaller ones two figures."""
    one = planned()
    of = {12.0: 2, 10.0: 2, 9.99: 3, 1000.0: 0, 20_000.0: 0, 999.0: 1, 0.05: 5}
    assert {step: decimals(replace(one, seconds={"matrix": step})) for step in of} == of
    texts = {
        3.14159: "3.14 s", 0.0: "0.00 s", 0.0314159: "0.031 s", 0.1: "0.10 s", 0.00999: "0.0100 s",
        -0.5: "−0.50 s", 1e-5: "0.000010 s",
    }  # fmt: skip
    assert {seconds: seconds_text(one, seconds) for seconds in texts} == texts
    signed = {-1.25: "−1.2 s", 0.0: "+0.0 s", 1.26: "+1.3 s"}
    assert {seconds: signed_text(seconds, 1) for seconds in signed} == signed
    assert gb_text(12.34e9) == "12.3"


def test_words_are_counted_and_listed():
    counted = {(1, "node"): "1 node", (2, "node"): "2 nodes", (0, "node"): "0 nodes"}
    counted |= {(1, "micro-batch"): "1 micro-batch", (3000, "micro-batch"): "3,000 micro-batches"}
    assert {of: count_text(*of) for of in counted} == counted
    lists = {(): "", ("a",): "a", ("a", "b"): "a or b", ("a", "b", "c"): "a, b or c"}
    assert {texts: listed(texts, "or") for texts in lists} == lists
    several = [{"new": 1.0, "fixed": 0.0, "head": 0.0}, {"head": 2.0, "matrix": 0.1, "bubble": 0.0}]
    assert parts_of(several, SECONDS) == ["matrix", "head", "new"]
    assert run().usable_bytes == 48e9
