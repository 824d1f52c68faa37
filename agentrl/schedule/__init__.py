"""When groups of episodes start and when they are trained on: the window, the pipeline that follows it, and a clock to simulate both."""
