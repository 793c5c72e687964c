"""Device graphs of a runner's steps: the choice of shapes, their capture, and their replay."""
