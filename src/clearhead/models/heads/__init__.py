"""What the heads of a recorded model do: measures of each, as a table, and the most distinctive one."""
