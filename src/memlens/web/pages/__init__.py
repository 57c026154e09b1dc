"""One module per page, each with one `router`: HTML for people, and JSON under /api/ for scripts."""
