"""What a person sees: the terminal, the HTML report, figures. These rooms show; they never compute.

terminal.py  progress and tables      report.py  a run's page      streams.py  a continual run: progress, table, figures
figures.py   every figure by name, drawn by charts.py, heat.py and pictures.py from what sources.py reads
style.py     how figures look         tables.py  the paper's figures, to draw beside ours
"""
