"""The course as files: its notebooks, labs and stand-alone copies, and the rules they keep.

Only :mod:`flashcourse.course.on_colab` is for a learner's kernel, and it needs the standard library
alone; everything else here is for the people who write the course.
"""
