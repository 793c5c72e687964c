"""A small HTTP client for load tests: low cost per request, and limits for hostile servers."""
