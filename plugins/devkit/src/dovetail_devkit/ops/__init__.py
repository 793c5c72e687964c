"""What the suite of op providers is made of: inputs, random draws and rotary tables."""
