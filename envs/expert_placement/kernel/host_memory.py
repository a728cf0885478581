"""Host memory that holds some of the experts, and the drive that has all of them."""

from __future__ import annotations

from servegym._jit import jit


@jit
def in_host_memory(c, plant, st, n, expert, now):
    """When an expert is in a server's host memory, for a load or fetch with the last number.

    What is not there is read from the drive, in place of the one that was asked for longest ago;
    where all are still being read, it is not kept.
    """
    if not c.host_limited:
        return now
    about = st.host[n, expert]
    if about.ready < 0.0:
        v = st.server[n]
        v.drive_free = max(now, v.drive_free) + c.read
        if not _make_room(c, plant, st, n, now):
            return v.drive_free
        about.ready = v.drive_free
    about.stamp = st.meta[0].loads
    return max(now, about.ready)


@jit
def _make_room(c, plant, st, n, now):
    """Give up an expert if a server's host memory is full; returns whether there is room."""
    used = 0
    oldest = -1
    for i in range(c.layers * c.experts):
        if st.host[n, i].ready >= 0.0:
            used += 1
            # What is still being read cannot be given up: its reader waits for it.
            there = st.host[n, i].ready <= now
            if there and (oldest < 0 or st.host[n, i].stamp < st.host[n, oldest].stamp):
                oldest = i
    if used < plant.server[n].host_slots:
        return True
    if oldest >= 0:
        st.host[n, oldest].ready = -1.0
    return oldest >= 0
