"""One HTML page out of the logs of one or several runs; no service, no network.

=============  ============================================================================
module         idea
=============  ============================================================================
``run``        a run as plain data, and arithmetic on its series
``folders``    which runs lie in a folder
``logs``       reads a run from Lightning's CSV log, an offline W&B run or ``result.json``
``settings``   nested settings as flat text; which of them differ
``reading``    all runs of a command line, under names that tell them apart
``quality``    which metric tells the quality of a run, and which way is better
``charts``     what is drawn: lines of plain numbers
``figures``    how it is drawn: SVG whose colours the page decides
``numbers``    numbers as text
``totals``     one row of figures for each run
``page``       the HTML
=============  ============================================================================
"""
