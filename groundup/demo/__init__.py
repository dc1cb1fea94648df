"""What can be tried with nothing at hand?"""
