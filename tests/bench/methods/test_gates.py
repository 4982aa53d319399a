"""Gates, and methods behind them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caster import CasterError, wrap
from caster.models.protocol import Outputs
from caster_bench.methods.gates import Certificate, Decision, Gated, Referee
from caster_bench.methods.protocol import Retained
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.conftest import problem
from tests.support.problem import model, source, stream


class Every:
    """Accepts every n-th batch."""

    name = "every"

    def __init__(self, n):
        self.n, self.seen = n, 0

    def judge(self, outputs):
        self.seen += 1
        return Decision(self.seen % self.n == 0, "turn", 0.5)

    def reset(self):
        self.seen = 0

    def retained(self):
        return Retained()


def test_the_referee_counts_agreement():
    h, y = problem(n=600, n_classes=4, seed=1)
    frozen = wrap(lambda batch: (batch, 0 * batch[:, :4]), version="referee-1")
    known = Source.fit(frozen, [(h, y)])
    gda = create("source-gda", frozen, known)
    batch = h[:50]
    by_gda = gda.predict(batch).logits.argmax(axis=1)
    for wrong in (0, 5, 10, 11, 50):
        logits = np.eye(4)[np.where(np.arange(50) < wrong, (by_gda + 1) % 4, by_gda)]
        given = Referee(frozen, known, agreement=0.8).judge(Outputs(batch, logits))
        assert given.ratio == pytest.approx(wrong / 50)
        assert given.accepted == (wrong <= 10)
        assert given.reason == ("accepted" if wrong <= 10 else "disagreement")


def test_certificate_gate_returns_the_verdict():
    gate = Certificate(model(), source())
    method = create("caster", model(), source())
    for batch in (*stream(2), *stream(2, shift=2.5), *stream(1, size=1)):
        decision, given = gate.judge(model()(batch)), method.predict(batch)
        assert (decision.accepted, decision.reason) == (given.accepted, given.reason)
        assert decision.ratio == given.ratio


def test_rejected_batch_does_not_reach_the_method():
    method = Gated(create("tent", model(), source()), Every(2))
    alone = create("tent", model(), source())
    frozen = create("frozen", model(), source())
    for i, batch in enumerate(stream(6)):
        given = method.predict(batch)
        if i % 2:
            assert torch.equal(given.logits, alone.predict(batch).logits)
        else:
            assert torch.equal(given.logits, frozen.predict(batch).logits)
        assert (given.accepted, given.reason, given.ratio) == (bool(i % 2), "turn", 0.5)
    for name, learnt in method.method.parameters.items():
        assert torch.equal(learnt, alone.parameters[name])


def test_an_inert_method_behind_a_gate_stays_inert():
    given = Gated(create("tent", model("layer"), source("layer")), Every(1)).predict(stream(1)[0])
    assert (given.accepted, given.reason, given.ratio) == (False, "inert", 0.5)


@pytest.mark.parametrize(("name", "passes"), [("tent", 1), ("source-gda", 1), ("sar", 3)])
def test_a_method_that_needs_no_pass_of_its_own_shares_the_one_of_its_gate(name, passes):
    own, known = model("layer"), source("layer")
    (batch,) = stream(1)
    own(batch)  # finds its head
    calls = []
    own.module.register_forward_pre_hook(lambda *_: calls.append(1))
    method = Gated(create(name, own, known), Every(1))
    calls.clear()
    found = method.predict(batch)
    assert len(calls) == passes
    alone = create(name, own, known).predict(batch)
    assert torch.equal(torch.as_tensor(found.logits), torch.as_tensor(alone.logits))


@pytest.mark.parametrize("gate", ["certificate", "referee"])
def test_any_method_can_be_gated_by_name(gate):
    method = create(f"bn-adapt+{gate}", model(), source())
    assert method.name == f"bn-adapt+{gate}"
    assert method.retained().statistics > 0
    given = method.predict(stream(1)[0])
    assert given.ratio is not None


def test_gate_settings_are_separate_from_the_methods():
    batch = stream(1, shift=1.0)[0]
    method = create("tent+referee", model(), source(), lr=0.0, gate={"agreement": 0.01})
    assert method.predict(batch).accepted
    assert method.method.lr == 0.0
    with pytest.raises(
        CasterError, match="the referee has no setting 'tau': its settings are agreement"
    ):
        create("tent+referee", model(), source(), gate={"tau": 1})
    with pytest.raises(CasterError, match="has no gate to set: name one"):
        create("tent", model(), source(), gate={"agreement": 0.5})
    with pytest.raises(CasterError, match="agreement must be a share from 0 to 1"):
        create("tent+referee", model(), source(), gate={"agreement": 1.5})


def test_gates_need_a_state():
    for gate in ("certificate", "referee"):
        with pytest.raises(CasterError, match=f"{gate} needs a state"):
            create(f"frozen+{gate}", model())
    h, y = problem(n=400, n_classes=5, seed=3)
    frozen = wrap(lambda batch: (batch, batch[:, :2]), version="others-2")
    known = Source.fit(frozen, [(h, y)], use_head=False)
    with pytest.raises(CasterError, match="the referee compares the model's own classes"):
        Referee(frozen, known)


def test_gate_is_reset_with_its_method():
    method = Gated(create("frozen", model(), source()), Every(2))
    (batch,) = stream(1)
    first = [method.predict(batch).ratio, method.gate.seen]
    method.reset()
    assert method.gate.seen == 0
    assert [method.predict(batch).ratio, method.gate.seen] == first


def test_certificate_threshold_can_be_set():
    (batch,) = stream(1)
    assert Certificate(model(), source()).judge(model()(batch)).accepted
    assert not Certificate(model(), source(), tau=1e-6).judge(model()(batch)).accepted
    with pytest.raises(CasterError, match="tau must be a number above 0"):
        Certificate(model(), source(), tau=0.0)
