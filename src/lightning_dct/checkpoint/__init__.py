"""All that is saved and read: one format, one reader, one way back.

    files       complete or absent, locked while they are written; where they lie; which ones are outdated
    format      the note in Lightning's checkpoint, each rank's file, and what both may say
    reading     the same on all ranks, or an error on all of them
    merging     the states of all ranks, for another number of ranks

Strategies save and load with these in :mod:`lightning_dct.saving`; each part of the package gives its own state.
:mod:`lightning_dct.embedding.table_files` has the rows of sharded tables.
"""
