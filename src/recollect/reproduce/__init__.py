"""The paper's tables and figures as jobs: what is in each, at two scales, how a cell becomes a row, and the page of the rows.

tables.py says what the cells are, paper.py what the paper prints of them, scales.py what they are given. work.py distils and
measures; rows.py keeps what came out, and reads what earlier scripts have measured; page.py and pictures.py show it.
"""
