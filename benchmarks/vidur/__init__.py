"""The Vidur paper's searches again: the question (`question`), and its best deployment beside ours (`best`, `operators`)."""
