"""What others offer for the same job, each in the form in which a user would take it."""
