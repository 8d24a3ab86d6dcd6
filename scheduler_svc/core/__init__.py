"""The core: who runs, how many tokens each computes, which blocks they own. Theory of operation.

Two facts shape everything.

1. The executor runs plans strictly in order. So a block given back may be handed out again at once, in the next plan:
   its new owner's writes come after its old owner's reads. A prompt's block may be named in the prefix index as soon as
   the step that computes it is planned: whoever hits it reads later. And plan k + 1 is sent before result k is read.
2. A decode step changes one number per sequence, the same way. So running sequences are columns (rows.py), a step is a
   few array operations, and Python looks only at rows that cross a block boundary, stop, join or leave.

The life of a sequence (sequence.py has the states):

    submit ─► WAITING ──admit──► RUNNING ──last step planned──► FINISHING ──its result──► FINISHED
                 ▲                  │                               │
                 └──── preempt ─────┴──────── executor lost ────────┘

While it runs, two numbers say all: how many tokens are known and how many are computed. It catches up, in chunks that
the token budget allows, until only its newest token is not computed; each step that computes the newest one draws
another. Prompts, the rest after a prefix hit, and recomputation after a preemption are the same line of code.

What is known when. With `depth` plans in flight the scheduler counts tokens that are drawn but not yet seen; that
suffices to plan. It knows beforehand which step draws the last token that max_tokens allows, and releases the row in
the plan after it: no step is wasted. A stop id is seen only at commit; then the steps in flight for that row are worth
nothing, and their tokens are dropped because the row's `seat` has changed. The same rule drops what a preempted
sequence had in flight; it draws the same tokens again, since the noise depends on (seed, choice, position) and on
nothing else.

Three ways to do nothing twice:

    release   one function gives up a row (Epoch._unseat), one gives back blocks (Memory.retire)
    resume    is admission, with more known tokens
    recovery  losing an executor is preempting everybody: drop the Epoch, keep the queue

Why there is no deadlock. A sequence takes blocks for all its known tokens when it is admitted, or none. Growth takes
from the tail of the running order, so the first in order always finds room: every request fits the pool alone, or was
refused. Why there is no livelock: after `max_preemptions` a sequence is admitted only when its worst case fits beside
that of others so protected, and is never a victim again. Why nobody starves: heads of the queue are never passed by
those that fit better, and of every AGEING admissions one goes to whoever waits longest.

How to read: contract.py (what crosses the edge), sequence.py, block_pool.py, prefix_index.py, memory.py (the two
together), rows.py, epoch.py (all that dies with an executor), quarantine.py (who may be the reason why), door.py (how
long a wait), policy.py and admission.py (who, and whether), planner.py (a step), committer.py (its result), registry.py
(names and events), story.py (what happened, in words), scheduler.py (the face). tests/sim proves it.
"""
