"""What computes: one class per kind of device behind one interface (base.py)."""
