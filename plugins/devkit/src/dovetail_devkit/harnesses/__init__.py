"""Test harnesses that several members share: a tiny model runner and fake devices."""
