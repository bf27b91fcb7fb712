"""A job's life: records in, rows through the stages, answers out."""
