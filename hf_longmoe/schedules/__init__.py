"""The exact schedules. Pure torch: none of them knows a model family, a host library or another schedule."""
