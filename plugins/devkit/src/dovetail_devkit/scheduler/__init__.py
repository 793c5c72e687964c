"""What the scheduler suite is made of: random programs, and a referee that checks each step."""
