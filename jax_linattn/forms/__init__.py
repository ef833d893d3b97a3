"""The forms of linear attention: one result, several ways to compute it, one file each."""
