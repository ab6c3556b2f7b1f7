"""report: every analysis that fits into a time, on one page.

``plan`` says what fits, ``run`` measures, ``glance`` puts the main numbers into words, ``figures`` and ``tables`` turn
what the commands draw and print into SVG and HTML, ``page`` puts it together.
"""
