"""ckpttool.naming.pairing"""
