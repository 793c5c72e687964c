"""The parts of the ops suite: inputs, random sampling and rotary tables."""
