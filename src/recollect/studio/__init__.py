"""The studio: a web page on which to look into memories, and to build and try classifiers of their classes.

shelf.py  the memories, and what a browser needs to recall from them     jobs.py  trainings, one after another
uploads.py  bodies and pictures from outside, with limits                guard.py  who may ask, and what is answered
app.py  the addresses                                                    static/  the page
"""
