"""Pages: the pool, block tables, reference counts, and how slid spans get to their new places."""
