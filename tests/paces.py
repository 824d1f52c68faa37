"""Random sizes of the window."""

from hypothesis import strategies as st

from agentrl.schedule.window import Pace


@st.composite
def paces(draw) -> Pace:
    batch, interval = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        return Pace(batch=batch, buffer=(interval + 1) * batch, interval=interval, whole_rollouts=True)
    buffer = batch * interval + draw(st.integers(0, 12))
    return Pace(batch=batch, buffer=buffer, window=draw(st.integers(1, buffer)), interval=interval)
