"""What is summed unseen: a method's terms as masked integers, by the protocol of fedveil/federation/secure.

ring.py        values as integers modulo 2^w, and back
summands.py    a method's terms as one vector of integers; the sums of such vectors
noise.py       the shares of noise that are in a sum
uploads.py     an upload as a message, and a client's turn
local.py       server and sites in one process
"""
