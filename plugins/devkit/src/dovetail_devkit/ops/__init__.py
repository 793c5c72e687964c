"""The parts of the ops suite: inputs, random draws and rotary tables."""
