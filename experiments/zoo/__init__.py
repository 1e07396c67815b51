"""A dozen small trainings that people recognise, to be run under any strategy, and the table they
end in.
"""
