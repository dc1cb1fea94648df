"""What do these files say?"""
