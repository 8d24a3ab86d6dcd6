"""The journal: everything that went into the core, so that its every plan can be made again on another machine.

frames.py     a file of frames that survives a torn tail
mask.py       token ids, tenants and salts replaced, equality kept
snapshot.py   the core as data, and back
recorder.py   the core with a journal beside it
replay.py     a journal run through the core, plan by plan

The core knows nothing of it. A journal that became half its limit is renamed to FILE.1 and a new one begins with a
snapshot, so each of the two files can be replayed alone, and together they stay within the limit. The file of a
scheduler that died is kept as FILE.1 in the same way.
"""
