"""What recorded calls say: values made of calls, which change nothing."""
