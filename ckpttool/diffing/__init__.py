"""ckpttool.diffing"""
