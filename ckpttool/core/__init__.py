"""ckpttool.core"""
