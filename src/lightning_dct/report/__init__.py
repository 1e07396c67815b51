"""One HTML page out of the logs of one or several runs; no service, no network.

=============  ===========================================================================
module         idea
=============  ===========================================================================
``run``        a run as plain data: series by name, settings, figures known besides
``folders``    which runs lie in a folder
``csv_log``    reads what Lightning's ``CSVLogger`` leaves
``wandb_log``  reads what an offline W&B run leaves
``train_log``  reads what ``experiments/train.py`` leaves beside a log
``settings``   nested settings as flat text; which of them differ
``reading``    all runs of a command line, under names that tell them apart
``series``     arithmetic on series: bytes at a step, averages, best values
``quality``    which metric tells the quality of a run, and which way is better
``charts``     what is drawn: lines of plain numbers
``figures``    how it is drawn: SVG whose colours the page decides
``totals``     one row of figures for each run
``page``       the HTML
=============  ===========================================================================
"""
