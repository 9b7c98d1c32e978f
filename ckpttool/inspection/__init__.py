"""ckpttool.inspection"""
