"""Several synchronisations side by side: their runs, the sweep of a setting, one table and one
picture.
"""
