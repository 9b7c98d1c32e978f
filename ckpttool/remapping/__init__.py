"""ckpttool.remapping"""
