"""The engine core: one inner loop per replica, and its process."""
