"""What is done with recorded episodes, without training: replay through today's code, score anew, go on from a turn."""
