"""Several simulated engines: routers, replicas, and separate engines for prefill and decode."""
