"""Methods that DCT is compared with: others' code where there is some, else their published
rules.
"""
