"""A batch size by evidence: both laws by hand, and one table beside the plan's speed."""

import json

import pytest

from kielo.cli.main import main
from kielo.plan.batch_sizes import laws


def test_both_laws_by_hand():
    """At 2 nats Kaplan's critical batch is 2e8 / 2^4.76 = 7.4 million tokens; after a billion tokens Zhang's
    is 22.91 × 1000^0.47 = 589 sequences of 512. At its critical batch each has its authors' overhead.
    """
    kaplan, zhang = laws(2.0, 1e9)
    assert kaplan.critical == pytest.approx(7.373e6, rel=1e-3)
    assert zhang.critical == pytest.approx(588.9 * 512, rel=1e-3)
    assert kaplan.tokens(kaplan.critical, 0) == pytest.approx(2.0)
    assert zhang.tokens(zhang.critical, 0) == pytest.approx(1.2)
    assert kaplan.tokens(kaplan.critical, kaplan.critical) == 1
    # four times the critical batch, by a batch of the critical size: (1 + 4) / (1 + 1)
    assert kaplan.tokens(4 * kaplan.critical, kaplan.critical) == pytest.approx(2.5)


def test_the_published_fits_of_zhang_agree():
    """93.20 · N^0.47 sequences for N million parameters at 20 tokens each is the paper's other fit."""
    assert laws(3.0, 20 * 302e6)[1].critical / 512 == pytest.approx(93.20 * 302**0.47, rel=0.01)


def test_a_larger_batch_trades_tokens_for_speed(capsys):
    """The run's own steps gain and cost nothing; larger steps cost more by each law."""
    words = ["plan", "norwegian_7b", "--nodes", "64", "--batch"]
    assert main(["plan", "ltg_bert_base", "--nodes", "16", "--batch"]) == 0
    assert "This model learns hidden tokens, and both laws are of next tokens." in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    by_size = {row["tokens_per_step"]: row for row in told["batches"]}
    own = by_size[4_194_304]
    assert own["speed"] == 1 and set(own["tokens"].values()) == {1}
    for name in own["tokens"]:
        shares = [row["tokens"][name] for row in told["batches"]]
        assert shares == sorted(shares) and shares[0] < 1 < shares[-1]
    assert by_size[2 * 4_194_304]["speed"] > 1
    assert main(words) == 0
    table = capsys.readouterr().out
    rows = [line.split("\t") for line in table.splitlines() if line[0].isdigit()]
    own_row, larger = next(row for row in rows if row[0] == "4,194,304 *"), rows[-1]
    assert own_row[3:6] == ["+0%"] * 3 and len(own_row) == len(larger) == 8
    share = by_size[int(larger[0].replace(",", ""))]["tokens"]["Kaplan et al. 2020"]
    assert larger[4] == f"{share - 1:+.0%}"
    assert "Critical batch" in table and "learning rate" in table
    assert main(["plan", "norwegian_7b", "--nodes", "4,8", "--batch"]) == 1
