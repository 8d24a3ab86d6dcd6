"""What a witness of a world sees: which rare events its plans contain, and that nobody reads what is not theirs."""

from typing import TYPE_CHECKING

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.sequence import State

if TYPE_CHECKING:
    from tests.sim.world import World

# Each of these must have happened somewhere in any thousand worlds.
SOMETIMES = (
    "admitted with output",
    "a live stream's output is hit",
    "a prompt scored and preempted",
    "a prompt scored and resumed",
    "a row rests",
    "all but the last token hit",
    "cancelled while finishing",
    "cancelled while parked",
    "cancelled while running",
    "cancelled while waiting",
    "cancelled with followers",
    "capacity changed",
    "convicted: guilty",
    "executor lost in the middle of a prompt",
    "executor lost with a sequence finishing",
    "executor lost with steps in flight",
    "finished CANCELLED",
    "finished EXPIRED",
    "finished FAILED",
    "finished LENGTH",
    "finished STOP",
    "finishing blocks reclaimed",
    "followed a prefix being computed",
    "fork by copy",
    "output tokens hit after a preemption",
    "preempted and yet right",
    "preempted as often as may be",
    "preempted while in flight",
    "protected sequence ran",
    "prefix hit",
    "prompt in chunks",
    "refused: early",
    "refused: foreign",
    "refused: it could never fit",
    "refused: late",
    "refused: no such token",
    "refused: old epoch",
    "refused: one too many",
    "refused: queue full",
    "refused: rows differ",
    "refused: tenant",
    "refused: tokens differ",
    "release and nothing else",
    "resumed and yet right",
    "resumed with some choices ended",
    "row reused in the plan that released it",
    "scheduler restarted",
    "session dropped",
)


def note_plan(world: "World", plan: step_pb2.StepPlan | None, preemptions_before: int) -> None:
    seen, epoch = world.seen, world.scheduler._epoch
    assert epoch is not None
    preempted = epoch.num_preemptions - preemptions_before
    seen["preempted"] += preempted
    seen["preempted while in flight"] += preempted and bool(world.in_flight)
    seen["preempted in the middle of a prompt"] += preempted > 0 and any(
        sequence.state is State.WAITING and 0 < sequence.num_lost_tokens < sequence.num_prompt
        for sequence in world.scheduler._registry.sequences.values()
    )
    seen["finishing blocks reclaimed"] += any(not sequence.blocks for sequence in epoch.finishing.values())
    seen["followed a prefix being computed"] += any(sequence.followers for sequence in epoch.catching_up)
    seen["protected sequence ran"] += epoch.protected_blocks > 0
    if plan is None:
        return
    check_isolation(world, plan)
    seen["prompt in chunks"] += bool(plan.prefill)
    seen["a row rests"] += 0 in np.frombuffer(plan.prefill, "<i4")[1::2]
    seen["fork by copy"] += bool(plan.copy)
    released = set(np.frombuffer(plan.release, "<i4").tolist())
    seen["row reused in the plan that released it"] += any(admit.row in released for admit in plan.admit)
    seen["release and nothing else"] += not epoch.rows.num_live
    for admit in plan.admit:
        seen["a live stream's output is hit"] += shares_with_a_stream(world, admit)
        seen["prefix hit"] += admit.num_computed_tokens > 0
        num_known = len(admit.token_ids) // 4
        seen["all but the last token hit"] += admit.num_computed_tokens == num_known - 1 > 0
        seen["output tokens hit after a preemption"] += admit.num_computed_tokens > admit.num_prompt_tokens
        seen["admitted with output"] += num_known > admit.num_prompt_tokens


def shares_with_a_stream(world: "World", admit: step_pb2.Admit) -> bool:
    """Whether a block it was given holds tokens that a running sequence of another request drew."""
    epoch = world.scheduler._epoch
    assert epoch is not None
    size = world.geometry.block_size
    mine = np.frombuffer(admit.block_ids, "<i4")[: admit.num_computed_tokens // size].tolist()
    newcomer = epoch.rows.sequence[admit.row]
    assert newcomer is not None
    for other in epoch.rows.sequence:
        if other is not None and other.state_of_request is not newcomer.state_of_request:
            drawn = epoch.rows.blocks(other.row)[other.num_prompt // size :]
            if set(mine) & set(drawn):
                return True
    return False


def check_isolation(world: "World", plan: step_pb2.StepPlan) -> None:
    """Nobody is given blocks of another tenant or salt, nor a row while one of its steps is in flight."""
    epoch = world.scheduler._epoch
    assert epoch is not None
    for admit in plan.admit:
        sequence = epoch.rows.sequence[admit.row]
        assert sequence is not None
        request = sequence.request
        domain = (request.tenant, request.cache_salt)
        blocks = np.frombuffer(admit.block_ids, "<i4").tolist()
        num_shared = admit.num_computed_tokens // world.geometry.block_size
        for block in blocks[:num_shared]:
            assert world.domains[block] == domain, f"{request.request_id} reads a block of {world.domains[block]}"
        world.domains.update(dict.fromkeys(blocks[num_shared:], domain))
        for step in list(epoch.in_flight)[:-1]:
            mine = (step.roster.session == request.session) & (step.roster.handle == sequence.handle)
            assert not mine.any(), f"{request.request_id} is admitted while step {step.step_id} is in flight"
    for row, block in np.frombuffer(plan.grow, "<i4").reshape(-1, 2).tolist():
        sequence = epoch.rows.sequence[row]
        assert sequence is not None
        world.domains[block] = (sequence.request.tenant, sequence.request.cache_salt)
