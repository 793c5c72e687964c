"""Device graphs of a runner's steps: which are captured, their capture, and their replay."""
